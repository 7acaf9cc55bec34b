"""What executors are made of: the names that a plugin which places ranks may use, beside `core.contracts`. No torch.

Those of Ray say in one line why a cluster cannot be used, for whoever places ranks, or anything else, on one.
"""

from hookline.core.plugin.environment import environment as environment
from hookline.core.util.ray_cluster import (
    connected_ray as connected_ray,
    free_resources as free_resources,
    last_line as last_line,
    within as within,
)
