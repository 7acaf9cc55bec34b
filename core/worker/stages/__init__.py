"""One stage of a model that is cut into stages: micro-batches between ranks of which each has some of the layers."""
