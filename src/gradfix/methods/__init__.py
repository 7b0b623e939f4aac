"""Methods side by side under one label budget: trial, methods, search, results and verdict."""
