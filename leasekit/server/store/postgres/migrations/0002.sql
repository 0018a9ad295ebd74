-- The settings of kinds. Each change of one counts up `kind_change`, by which the nodes see that they must read again.

ALTER TABLE leasekit.store ADD COLUMN kind_change bigint NOT NULL DEFAULT 0;

CREATE TABLE leasekit.kind (
    name text COLLATE "C" NOT NULL PRIMARY KEY,
    settings bytea,                -- as JSON; null: the kind no longer has any
    changed_at double precision NOT NULL,
    changed_by text,
    change bigint NOT NULL         -- what `kind_change` was when this was written
);
