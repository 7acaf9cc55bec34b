"""`hookline warm model=NAME [card=h200]`: compiles an engine's kernels into Triton's cache, for an image.

Needs no GPU if the card is named. Importing it imports neither torch nor Triton.
"""
