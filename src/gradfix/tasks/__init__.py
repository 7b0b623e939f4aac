"""Tasks: how one family of models is loaded, fed and scored."""
