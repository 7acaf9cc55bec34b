"""Paged attention: decodes, prompts, prefixes that decodes share, and its forms (windows, scales, soft caps, sinks)."""
