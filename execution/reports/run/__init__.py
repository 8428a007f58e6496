"""A run as a page: read from its folder alone, while it trains or after."""
