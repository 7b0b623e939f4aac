"""From folder to folder in flat pieces: memory stays flat whatever the model's size."""
