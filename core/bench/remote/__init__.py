"""The client of `hookline bench url=http://host:port`: loads any OpenAI-compatible server and measures from
outside.

settings: what is asked of the client. connection: HTTP over asyncio. body: what a request says. answer: what streams
back. driver: the open loop. recording: what was seen, in the form of any benchmark. command: one benchmark.
Bare at import; never imports torch.
"""
