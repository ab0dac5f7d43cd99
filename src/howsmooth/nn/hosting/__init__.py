"""Inside other people's models: our layers in the place of their attention, and listening to either."""
