-- The settings of kinds with their limits, gates, the keys of tasks, what tasks wait for, and what they came from. Each
-- change of a kind or a gate counts up `kind_change`, by which the nodes see that they must read again.

ALTER TABLE leasekit.store ADD COLUMN kind_change bigint NOT NULL DEFAULT 0;
ALTER TABLE leasekit.store ADD COLUMN has_waits boolean NOT NULL DEFAULT false;  -- whether `wait` has ever had a row

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

-- Tasks with keys. While such a task waits, `next_trigger_at` of its `trigger` is in the year 9999, so that nodes of
-- version 1 leave it to the others.
CREATE TABLE leasekit.keyed (
    seq bigint NOT NULL PRIMARY KEY,
    kind text COLLATE "C" NOT NULL,
    priority integer NOT NULL,
    key text COLLATE "C" NOT NULL,
    due_at double precision        -- null: the task does not wait
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ix_keyed_queued ON leasekit.keyed (kind, priority, key, due_at, seq) WHERE due_at IS NOT NULL;

-- The keys of each kind and priority that have waiting tasks, or have taken more tasks than others.
CREATE TABLE leasekit.share (
    kind text COLLATE "C" NOT NULL,
    priority integer NOT NULL,
    key text COLLATE "C" NOT NULL, -- empty: tasks without a key
    taken double precision NOT NULL,
    active boolean NOT NULL,       -- it has joined for its due tasks
    due_at double precision,       -- of its first task; null: it has none
    PRIMARY KEY (kind, priority, key)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ix_share_active ON leasekit.share (kind, priority, taken, key) WHERE active;
CREATE INDEX ix_share_joining ON leasekit.share (kind, priority, due_at) WHERE NOT active AND due_at IS NOT NULL;
CREATE INDEX ix_share_idle ON leasekit.share (kind, priority, taken) WHERE due_at IS NULL;

-- Token buckets of kinds with a rate. No bucket: it is full. The key is empty if the bucket is that of a whole kind.
CREATE TABLE leasekit.bucket (
    kind text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    full_at double precision NOT NULL,
    PRIMARY KEY (kind, key)
);

-- Live leases are counted by kind.
CREATE INDEX ix_trigger_running ON leasekit.trigger (kind) WHERE owner IS NOT NULL;

-- The tasks that run after others. The row goes when the awaited task has succeeded.
CREATE TABLE leasekit.wait (
    awaited text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    PRIMARY KEY (awaited, id)
);
CREATE INDEX ix_wait_id ON leasekit.wait (id);

-- Awaited tasks to be looked at: what waits for them may not know of their end, but for the first ones, up to `told`.
CREATE TABLE leasekit.wake (
    awaited text COLLATE "C" NOT NULL PRIMARY KEY,
    told text COLLATE "C" NOT NULL
);

-- The tasks that came from others.
CREATE TABLE leasekit.chain (
    seq bigint NOT NULL PRIMARY KEY,
    parent text COLLATE "C" NOT NULL,
    root text COLLATE "C" NOT NULL
);
CREATE INDEX ix_chain_root ON leasekit.chain (root, seq);

-- The roots of the chains to which no task is added any longer.
CREATE TABLE leasekit.cancelled_chain (
    root text COLLATE "C" NOT NULL PRIMARY KEY,
    at double precision NOT NULL
);
