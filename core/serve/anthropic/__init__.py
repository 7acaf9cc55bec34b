"""The endpoints of Anthropic's API."""
