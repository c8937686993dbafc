"""The privileged process: the only one that sets the device, for those whom the administrator permits.

``python -m polythrottle.actuation.server --socket PATH --device URI`` serves the protocol of
`polythrottle.actuation.wire`. Standard library, backends and actuation alone: what it computes with NumPy, a search
space, is computed by a child that ends.
"""
