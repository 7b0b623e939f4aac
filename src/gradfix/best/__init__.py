"""The recipe behind `--method best`: follow the task vector, then learn the rest from the old fine-tune."""
