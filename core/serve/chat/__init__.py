"""What conversations share, whichever API they come by: the chat template, turns, forced calls of tools."""
