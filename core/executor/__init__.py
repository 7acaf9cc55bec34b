"""Steps over several processes: starts ranks, sends them steps, watches and ends them. core.assembly builds workers."""
