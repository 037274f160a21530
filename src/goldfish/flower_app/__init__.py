"""What runs on Flower: the two apps that it loads, and how to deploy them."""
