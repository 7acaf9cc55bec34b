"""`serve run hookline.serve.ray:app key=value ...`: the server as a Ray Serve application. See docs/cluster.md."""

from hookline.core.serve.ray.app import app

__all__ = ["app"]
