"""The table of journeys: kinds of checkpoints people really have, times the commands they type."""
