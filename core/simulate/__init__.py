"""`hookline simulate workload=NAME`: predicts a benchmark's figures by a cost model of the step; no model, no GPU.

The same command line, sweeps, figures and result lines as `hookline bench`, and the same scheduler, block pool and
engine; only time is modelled. docs/simulation.md explains the cost models. Bare at import, and never imports torch.
"""
