"""The client of `hookline bench url=http://host:port`: sends a load to any OpenAI-compatible server and measures it.

settings: the client's keys. connection: HTTP over asyncio. body: requests. answer: streamed responses. driver: the open
loop. recording: measurements, in the form of any benchmark. command: the whole benchmark. Bare at import; never imports
torch.
"""
