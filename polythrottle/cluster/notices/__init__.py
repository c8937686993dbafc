"""Notices that a machine is about to be taken away, behind one poll.

sources          the notice itself, and its sources on the machine: a file, a signal, Slurm, Ray
cloud_metadata   AWS, Google, Azure: asked only if named, for at most a second, and never with the hard switch off
watch            polls the sources of a node beside its training
"""
