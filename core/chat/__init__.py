"""`hookline chat [CHECKPOINT]`: a conversation in the terminal, or with standard input, one message a line.

Bare at import, since child processes import it again. Answers alone go to standard output. Exit codes: 0 done; 2 a
user's error or a refused message; 130 interrupted.
"""
