"""Front ends and engines in processes of their own: their main functions, the supervisor, and the messages."""
