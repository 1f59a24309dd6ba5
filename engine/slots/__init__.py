"""Slots: named handles on sequences that outlive a request."""
