"""From a validated configuration to a running engine; the one place where all kinds of plugins meet."""
