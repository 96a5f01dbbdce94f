"""Known mistakes, planted to show that the exactness suite finds them."""
