"""Ray's draining nodes; the only module here that needs Ray."""

import time

from polythrottle.cluster.notices.schedulers import RaySource
from polythrottle.errors import InvalidInput


def ray_source() -> RaySource:
    """Return the source for the Ray node this process runs on.

    Raises:
        InvalidInput: If Ray is not installed, or this process is on no Ray node.
    """
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
        from ray._private.state import state  # type: ignore[import-not-found,unused-ignore]
    except ImportError as err:
        raise InvalidInput("the notice ray needs Ray: pip install 'polythrottle[cluster]'") from err
    if not ray.is_initialized():
        raise InvalidInput("the notice ray works inside a Ray job alone: ray.init() has not been called")
    node = str(ray.get_runtime_context().get_node_id())
    return RaySource(state.get_draining_nodes, node, lambda: time.time() * 1000)
