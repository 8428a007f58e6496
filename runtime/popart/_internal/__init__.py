"""What programs import of the native layer's own modules."""
