"""`hookline bench workload=NAME`: the speed of a configuration under a load, as a table and one JSON line.

Bare at import. Start-up and a warm-up request are measured apart; the best of the timed repetitions counts. A prompt
is a list of token ids and no text is made, so the engine alone is timed.
"""
