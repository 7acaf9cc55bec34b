"""Finding plugins, trying them out, keeping the sound ones, and comparing needs with facts."""
