"""Planner, pools and page allocator: integers on the host, arrays nowhere."""
