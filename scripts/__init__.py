"""Scripts that made files of this repository; users need none of them."""
