"""Methods side by side under one label budget: arena, methods, search, results and verdict."""
