"""Keep leases alive: claim tasks, renew their leases, remember what this process holds."""
