"""`hookline run`: prompts in, text out.

Bare at import, since child processes import it again: no torch, no Hydra, nothing but the standard library. Only
results go to standard output. Exit codes: 0 done; 2 a user's error or a refused request, one line each on standard
error; 1 a failed job of a sweep; 130 interrupted.
"""
