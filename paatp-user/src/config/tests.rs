use super::*;

fn job(name: &str) -> JobConfig {
    JobConfig::new(name, 4)
}

fn refusal(change: impl FnOnce(&mut JobConfig)) -> String {
    let mut changed = job("train");
    change(&mut changed);
    match Jobs::new(vec![changed]) {
        Ok(_) => "accepted".into(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn each_value_is_checked_and_named() {
    let cases: [(String, [&str; 3]); 13] = [
        (refusal(|job| job.name = "Train".into()), ["name", "Train", "a-z"]),
        (refusal(|job| job.name = "x".repeat(65)), ["name", "xxx", "64"]),
        (refusal(|job| job.name = String::new()), ["name", "``", "1 to 64"]),
        (refusal(|job| job.world = 0), ["world", "0", "1 to 64"]),
        (refusal(|job| job.world = 65), ["world", "65", "1 to 64"]),
        (refusal(|job| job.lanes = 100), ["lanes", "100", "multiples of 32"]),
        (refusal(|job| job.lanes = 864), ["lanes", "864", "832"]),
        (refusal(|job| job.slots = 64), ["slots", "64", "from 128"]),
        (refusal(|job| job.slots = 300), ["slots", "300", "powers of two"]),
        (refusal(|job| job.window = 0), ["window", "0", "65535"]),
        (refusal(|job| job.quorum = Some(5)), ["quorum", "5", "1 to 4"]),
        (refusal(|job| job.timeout_seconds = Some(0.5)), ["timeout_seconds", "0.5", "1 to 86400"]),
        (refusal(|job| job.timeout_seconds = Some(f64::NAN)), ["timeout_seconds", "NaN", "1 to 86400"]),
    ];
    for (message, parts) in cases {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn jobs_are_checked_together() {
    assert!(matches!(Jobs::new(vec![]), Err(ConfigError::NoJob)));
    assert!(matches!(Jobs::new(vec![job("a"), job("a")]), Err(ConfigError::Twice(name)) if name == "a"));
    let many = (0..65).map(|i| job(&format!("j{i}"))).collect();
    assert!(matches!(Jobs::new(many), Err(ConfigError::TooManyJobs(65))));
    let big = |i: usize| JobConfig { slots: MAX_RING_SLOTS, ..job(&format!("j{i}")) };
    assert!(matches!(Jobs::new((0..6).map(big).collect()), Err(ConfigError::Memory { .. })));
}

#[test]
fn the_largest_chunk_chooses_the_slots() {
    let size = |lanes| Jobs::new(vec![job("a"), JobConfig { lanes, ..job("b") }]).map(|j| j.slot_size());
    assert!(matches!(size(352), Ok(SlotSize::Standard)));
    assert!(matches!(size(384), Ok(SlotSize::Wide)));
    assert_eq!((SlotSize::Standard.bytes(), SlotSize::Wide.bytes()), (64 + 1408, 64 + 3328));
}

#[test]
fn the_table_holds_the_jobs_and_what_is_allowed() {
    let with = |jobs, memory, lanes| Jobs::with_memory(jobs, memory, lanes);
    let table = |jobs: Result<Jobs, ConfigError>| jobs.map(|jobs| (jobs.slots(), jobs.slot_size())).ok();
    assert_eq!(table(with(vec![], None, None)), Some((DEFAULT_MEMORY / 1472, SlotSize::Standard)));
    assert_eq!(table(with(vec![], Some(1 << 20), Some(832))), Some((309, SlotSize::Wide)));
    // Without a limit the jobs get what they need.
    let large = || vec![JobConfig { slots: 1 << 17, ..job("a") }];
    assert_eq!(table(with(large(), None, None)), Some((1 << 17, SlotSize::Standard)));
    assert!(matches!(with(large(), Some(1 << 20), None), Err(ConfigError::Budget { .. })));
    assert!(matches!(with(vec![], Some(0), None), Err(ConfigError::NoJob)));
    assert!(matches!(with(vec![], None, Some(833)), Err(ConfigError::NodeLanes(833))));
    assert!(matches!(with(vec![], Some(9 << 30), None), Err(ConfigError::Memory { .. })));
}

#[test]
fn a_pool_is_part_of_the_memory() {
    let node = |memory, pool| NodeConfig { memory, pool, ..NodeConfig::default() };
    let shared = |name| JobConfig { memory: MemoryKind::Shared, slots: 1 << 16, ..job(name) };
    let with = |list, node: NodeConfig| Jobs::of_node(list, &node);
    let pools = |jobs: Result<Jobs, ConfigError>| jobs.map(|jobs| (jobs.pool_slots(), jobs.slots())).ok();
    // 712 slots fit a MiB.
    assert_eq!(pools(with(vec![shared("a")], node(None, Some(1 << 20)))), Some((512, DEFAULT_MEMORY / 1472)));
    assert_eq!(pools(with(vec![shared("a"), shared("b")], node(Some(0), Some(1 << 20)))), Some((512, 514)));
    assert!(matches!(with(vec![shared("a")], node(None, None)), Err(ConfigError::NoPool(_))));
    assert!(matches!(with(vec![], node(None, Some(1000))), Err(ConfigError::SmallPool { .. })));
    let tight = node(Some(600 * 1472), Some(1 << 20));
    assert!(matches!(with(vec![job("a")], tight), Err(ConfigError::Budget { slots: 768, .. })));
    let wrong = NodeConfig { pool_places: Some(9), ..node(None, Some(1 << 20)) };
    assert!(matches!(with(vec![], wrong), Err(ConfigError::PoolPlaces(9))));
}

#[test]
fn sizes_have_units() {
    let read = |text| parse_size(text).ok();
    assert_eq!((read("4096"), read("3KiB"), read("2 GiB")), (Some(4096), Some(3072), Some(2 << 30)));
    for wrong in ["", "MiB", "-1", "1.5MiB", "1MB", "99999999999GiB"] {
        assert_eq!(read(wrong), None, "{wrong}");
    }
}

#[test]
fn f22_a_child_is_one_rank_of_its_parent() {
    let up = JobConfig { parent: Some("10.0.0.1".into()), child: Some(63), ..JobConfig::new("up", 64) };
    assert!(up.check().is_ok());
    assert_eq!(up.ranks_here().map(|ranks| (ranks.first(), ranks.last())), Some((0, 63)));
    let one = JobConfig { child: Some(0), world: 1, ..up.clone() };
    assert!(one.check().is_ok());
    let wrong = [
        (JobConfig { child: Some(64), ..up.clone() }, "child"),
        (JobConfig { child: Some(u32::MAX), ..up.clone() }, "child"),
        (JobConfig { parent: None, ..up.clone() }, "child"),
        (JobConfig { ranks: "0-3".parse().ok(), ..up.clone() }, "child"),
        (JobConfig { child: None, ..up.clone() }, "parent"),
        (JobConfig { world: 65, ..up.clone() }, "world"),
        (JobConfig { world: 0, ..up.clone() }, "world"),
        (JobConfig { quorum: Some(2), ..up.clone() }, "quorum"),
        (JobConfig { timeout_seconds: Some(5.0), ..up.clone() }, "timeout_seconds"),
        (JobConfig { memory: MemoryKind::Shared, ..up }, "memory"),
    ];
    for (job, key) in wrong {
        let refused = job.check().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains(key), "{key}: {refused}");
    }
}
