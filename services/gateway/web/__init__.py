"""The page for people at `/`, and what it reads: the fleet, and requests' timelines."""
