"""What a single request may ask for at most, so that none holds up the others. Beyond them it is refused on arrival.

A checkpoint's plugins may allow less: those in `plugins/samplers` say how many biases and bad words they take.
"""

MAX_SEED = 2**63 - 1
MAX_COMPLETIONS = 1024
MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities a request may ask for."""
MAX_WHOLE = 2**63 - 1
"""Largest whole number anywhere: what an int64 holds."""
MAX_TOP_K = 2**31 - 1
"""A larger top_k counts as this one, which is more than any vocabulary has."""
MAX_STOPS = 1024
"""Most stop strings."""
MAX_STOP_CHARACTERS = 16_384
"""Most characters of all stop strings together: finding them takes 16 bytes for each and 2 us to make."""
MAX_STOP_TOKEN_IDS = 4096
"""Most stop_token_ids: until min_tokens are there, each step names all of them to the device."""
MAX_BIASES = 16_384
"""Most entries of logit_bias."""
MAX_ALLOWED_TOKEN_IDS = 2**20
"""Most allowed_token_ids: more than any vocabulary has."""
MAX_BAD_WORDS = 1024
"""Most bad_words."""
MAX_BAD_WORD_CHARACTERS = 16_384
"""Most characters of all bad_words that are texts together."""
MAX_BAD_WORD_TOKEN_IDS = 16_384
"""Most token ids of all bad_words that are lists together."""
