"""Several task vectors into one: in memory, from folder to folder, and by recipe."""
