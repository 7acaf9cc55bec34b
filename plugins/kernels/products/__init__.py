"""Products of few rows with weight matrices, where a kernel of our own or a choice of tiles beats torch."""
