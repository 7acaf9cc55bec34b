"""Ranks as actors of Ray, in a placement group. Ray is told where they go, how they ended and to end them, no more."""
