"""Chats, shared by all APIs: the chat template, a turn's prompt and parsers, forced tool calls."""
