"""From files to texts to tokens, in streams."""
