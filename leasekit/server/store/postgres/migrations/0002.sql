-- The settings of kinds, and gates. Each change of one counts up `kind_change`, by which the nodes see that they must
-- read again.

ALTER TABLE leasekit.store ADD COLUMN kind_change bigint NOT NULL DEFAULT 0;

CREATE TABLE leasekit.kind (
    name text COLLATE "C" NOT NULL PRIMARY KEY,
    settings bytea,                -- as JSON; null: the kind no longer has any
    changed_at double precision NOT NULL,
    changed_by text,
    change bigint NOT NULL         -- what `kind_change` was when this was written
);

CREATE TABLE leasekit.gate (
    scope text COLLATE "C" NOT NULL,   -- kind or collection
    name text COLLATE "C" NOT NULL,
    mode text NOT NULL,                -- pause, drop or open: then its tasks are put back
    until double precision,
    reason text,
    changed_at double precision NOT NULL,
    changed_by text,
    PRIMARY KEY (scope, name)
);

-- Tasks of closed collections. `next_trigger_at` of such a task is in the year 9999.
CREATE TABLE leasekit.parked (
    collection text COLLATE "C" NOT NULL,
    due_at double precision NOT NULL,
    seq bigint NOT NULL,
    PRIMARY KEY (collection, due_at, seq)
);
CREATE INDEX ix_parked_seq ON leasekit.parked (seq);
