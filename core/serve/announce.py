"""What a server says when it is ready: what is served where, and a command to try it with."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hookline.core.serve.settings import ServeConfig


def start_message(settings: ServeConfig, port: int, names: Sequence[str], max_model_len: int, *, has_keys: bool) -> str:
    """A few lines for a terminal."""
    scheme = "http" if settings.tls_certificate is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    url = f"{scheme}://{host}:{port}"
    key = '\n    -H "Authorization: Bearer $HOOKLINE_API_KEY" \\' if has_keys else ""
    insecure = " -k" if scheme == "https" else ""
    body = json.dumps({"model": names[0], "prompt": "Hello", "max_tokens": 16})
    return f"""\
hookline: serving {", ".join(names)} (up to {max_model_len} tokens) at {url}/v1
  a page to try it    {url}/
  health, metrics     {url}/health  {url}/metrics
  from a terminal     curl{insecure} {url}/v1/completions -H "Content-Type: application/json" \\{key}
    -d '{body}'
Stop it with Ctrl-C."""
