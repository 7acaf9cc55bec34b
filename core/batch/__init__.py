"""`hookline batch INPUT OUTPUT`: answers a file of requests in OpenAI's batch format, without a server.

INPUT may be a folder of such files and of parquet, which is answered here or on Ray. Bare at import. The requests go to
the endpoints of `hookline serve` in this process, so that a row gets the answer of a server. Exit codes: 0 every row is
answered; 2 some are not, each with its reason in the output, or a user's error.
"""
