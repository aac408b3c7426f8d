"""The results of shadows, as Management stores them."""
