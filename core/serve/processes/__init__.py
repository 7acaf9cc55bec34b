"""Front ends and the engine in processes of their own: what they run, who starts them, what they tell each other."""
