use super::*;

/// Variables, as in `RANK=1 WORLD_SIZE=2`, of a process that process 77 started.
fn env(text: &str) -> Environment {
    Environment::new(text.split_whitespace().map(|pair| pair.split_once('=').expect("NAME=VALUE")), 77)
}

fn at(rendezvous: &str) -> Settings {
    let mut settings = Settings::default();
    settings.set("rendezvous", rendezvous).unwrap();
    settings
}

fn find(text: &str) -> Result<Option<Membership>> {
    Membership::find(&env(text), &Given::default(), &Settings::default())
}

#[track_caller]
fn found(text: &str) -> Membership {
    find(text).unwrap().expect("a rank")
}

/// `LAUNCHER RANK/SIZE LOCAL_RANK/LOCAL_SIZE JOB RENDEZVOUS`.
fn shown(m: &Membership) -> String {
    let number = |n: Option<u32>| n.map_or("-".into(), |n| n.to_string());
    let local = [m.local_rank, m.local_size].map(number).join("/");
    let place = m.rendezvous.as_deref().unwrap_or("here");
    format!("{} {}/{} {local} {} {place}", m.launcher, m.rank, m.size, m.job)
}

#[track_caller]
fn says(text: &str) -> String {
    let e = find(text).unwrap_err();
    assert!(e.is_config(), "{e}");
    e.to_string()
}

const TORCHRUN: &str = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29500 \
                        TORCHELASTIC_RUN_ID=run7";
const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                        OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=1 PMIX_NAMESPACE=1367343105";
const MPICH: &str = "PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=3";
const SLURM: &str = "SLURM_JOB_ID=1000 SLURM_STEP_ID=2 SLURM_PROCID=3 SLURM_NTASKS=5 SLURM_LOCALID=0 SLURM_NODEID=1 \
                     SLURM_STEP_NODELIST=node[07-08] SLURM_STEP_TASKS_PER_NODE=3,2 SLURM_LAUNCH_NODE_IPADDR=10.9.9.9";

#[test]
fn torchrun_names_rank_0s_host_and_the_port_after_its_own() {
    assert_eq!(shown(&found(TORCHRUN)), "torchrun 3/4 1/2 torchrun-run7-node0:29500 node0:29501");
    let last = found(&TORCHRUN.replace("29500", "65535"));
    assert_eq!(last.rendezvous.as_deref(), Some("node0:65534"));
    let v6 = found(&TORCHRUN.replace("node0", "fd00::1"));
    assert_eq!(v6.rendezvous.as_deref(), Some("[fd00::1]:29501"));
    // Programs that set what torchrun sets, without the numbers of a host.
    let plain = found("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=5");
    assert_eq!(shown(&plain), "torchrun 0/2 -/- torchrun-none-a:5 a:6");
}

#[test]
fn open_mpi_and_mpich_need_an_address_between_hosts_alone() {
    assert_eq!(shown(&found(OPEN_MPI)), "Open MPI 1/4 1/4 mpirun-1367343105 here");
    assert_eq!(shown(&found(MPICH)), "MPICH 2/3 2/3 mpiexec-77 here");
    let without = OPEN_MPI.replace("PMIX_NAMESPACE=1367343105", "");
    assert_eq!(found(&without).job, "mpirun-77");
    let several = [OPEN_MPI.replace("LOCAL_SIZE=4", "LOCAL_SIZE=2"), MPICH.replace("NRANKS=3", "NRANKS=4")];
    assert_eq!(
        says(&several[0]),
        "invalid rendezvous `none`: expected HOST:PORT at rank 0's host, because Open MPI has 2 of 4 ranks on this host \
         and names no host: mpirun -x PUSHGATE_RENDEZVOUS=HOST:PORT"
    );
    assert!(
        says(&several[1]).starts_with("invalid MPI_LOCALNRANKS `4`: expected 1 to 3, at most PMI_SIZE=3")
    );
    let several = MPICH.replace("LOCALRANKID=2", "LOCALRANKID=0").replace("NRANKS=3", "NRANKS=1");
    assert!(says(&several).ends_with("mpiexec -genv PUSHGATE_RENDEZVOUS HOST:PORT"), "{}", says(&several));
    let met = Membership::find(&env(&several), &Given::default(), &at("node0:7000")).unwrap().unwrap();
    // Each host's ranks have a parent of their own, so the name is without it.
    assert_eq!(shown(&met), "MPICH 2/3 0/1 mpiexec node0:7000");
}

#[test]
fn an_ipv6_address_of_torchrun_may_have_brackets() {
    for host in ["fd00::1", "[fd00::1]"] {
        let found = found(&TORCHRUN.replace("MASTER_ADDR=node0", &format!("MASTER_ADDR={host}")));
        assert_eq!(found.rendezvous.as_deref(), Some("[fd00::1]:29501"), "{host}");
    }
}

#[test]
fn slurm_meets_at_the_first_host_of_the_step() {
    // 23000 + (1000 * 16 + 2) % 4000
    assert_eq!(shown(&found(SLURM)), "Slurm 3/5 0/2 slurm-1000.2 node07:23002");
    let one = SLURM.replace("node[07-08]", "node07").replace("LOCALID=0", "LOCALID=3");
    assert_eq!(shown(&found(&one)), "Slurm 3/5 3/5 slurm-1000.2 here");
    let older = SLURM.replace("SLURM_STEP_NODELIST", "SLURM_NODELIST");
    assert_eq!(found(&older).rendezvous.as_deref(), Some("node07:23002"));
    let wrong = SLURM.replace("node[07-08]", "node[07-");
    assert!(
        says(&wrong).starts_with("invalid SLURM_STEP_NODELIST `node[07-`: expected hosts as in"),
        "{}",
        says(&wrong)
    );
    let arbitrary = format!("{SLURM} SLURM_DISTRIBUTION=arbitrary");
    assert!(
        says(&arbitrary).contains("PUSHGATE_RENDEZVOUS=HOST:PORT, with rank 0's host"),
        "{}",
        says(&arbitrary)
    );
    assert_eq!(
        found(&format!("{SLURM} SLURM_DISTRIBUTION=cyclic,block")).rendezvous.as_deref(),
        Some("node07:23002")
    );
    let none = SLURM.replace("SLURM_STEP_NODELIST=node[07-08]", "");
    assert!(says(&none).starts_with("invalid SLURM_NODELIST `not set`"), "{}", says(&none));
    let set = Membership::find(&env(&none), &Given::default(), &at("node0:7000")).unwrap().unwrap();
    assert_eq!(set.rendezvous.as_deref(), Some("node0:7000"));
}

#[test]
fn an_allocation_of_slurm_is_no_rank() {
    for not in [
        "",
        "SLURM_JOB_ID=1000 SLURM_NTASKS=4 SLURM_NODELIST=node[1-2]",
        // A batch script has a rank and no step, or one of Slurm's own numbers.
        "SLURM_JOB_ID=1000 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0",
        "SLURM_JOB_ID=1000 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEP_ID=4294967290",
        "SLURM_JOB_ID=1000 SLURM_PROCID=0 SLURM_STEP_ID=0",
        // Names that other programs use for themselves.
        "RANK=3 LOCAL_RANK=1 PATH=/bin",
    ] {
        assert_eq!(find(not).unwrap(), None, "{not}");
    }
}

#[test]
fn jobs_of_one_host_need_no_rendezvous_and_the_setting_has_the_last_word() {
    let here = [
        &TORCHRUN.replace("LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", "LOCAL_RANK=3 LOCAL_WORLD_SIZE=4"),
        OPEN_MPI,
        MPICH,
        &SLURM.replace("node[07-08]", "node07"),
        "PUSHGATE_RANK=0 PUSHGATE_RANKS=2",
    ];
    for text in here {
        assert_eq!(found(text).rendezvous, None, "{text}");
        let set = Membership::find(&env(text), &Given::default(), &at("10.0.0.1:7000")).unwrap().unwrap();
        assert_eq!(set.rendezvous.as_deref(), Some("10.0.0.1:7000"), "{text}");
    }
}

#[test]
fn a_world_of_one_needs_no_rendezvous() {
    for text in [
        "RANK=0 WORLD_SIZE=1",
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
        "PMI_RANK=0 PMI_SIZE=1",
        "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1",
        "PUSHGATE_RANK=0 PUSHGATE_RANKS=1",
    ] {
        let set = Membership::find(&env(text), &Given::default(), &at("10.0.0.1:7000")).unwrap().unwrap();
        assert_eq!((set.rendezvous, set.size, found(text).rendezvous), (None, 1, None), "{text}");
    }
}

#[test]
fn flags_win_over_our_variables_and_these_over_launchers() {
    let ours = "PUSHGATE_RANK=1 PUSHGATE_RANKS=2 PUSHGATE_LOCAL_RANK=0";
    let all = [ours, TORCHRUN, OPEN_MPI, MPICH, SLURM].join(" ");
    assert_eq!(shown(&found(&all)), "pushgate run 1/2 0/- pushgate here");
    let given = Given { rank: Some(4), ranks: Some(6), job: Some("mine".into()) };
    let flags = Membership::find(&env(&all), &given, &at("a:7")).unwrap().unwrap();
    assert_eq!(shown(&flags), "flags 4/6 0/- mine a:7");
    assert_eq!(found(&format!("{TORCHRUN} PUSHGATE_JOB=mine")).job, "mine");
}

#[test]
fn the_innermost_launcher_wins() {
    let launchers = [TORCHRUN, OPEN_MPI, MPICH, SLURM];
    let kinds = [Launcher::Torchrun, Launcher::OpenMpi, Launcher::Mpich, Launcher::Slurm];
    for inner in 0..launchers.len() {
        let all = launchers[inner..].iter().rev().copied().collect::<Vec<_>>().join(" ");
        assert_eq!(found(&all).launcher, kinds[inner]);
    }
    // A batch script's WORLD_SIZE does not hide srun.
    assert_eq!(found(&format!("{SLURM} WORLD_SIZE=5 MASTER_ADDR=a")).launcher, Launcher::Slurm);
    // srun --mpi=pmi2 sets the variables of PMI for its own tasks.
    assert_eq!(found(&format!("{SLURM} PMI_RANK=3 PMI_SIZE=5")).launcher, Launcher::Slurm);
    assert_eq!(found(&format!("{SLURM} PMIX_RANK=3 PMIX_NAMESPACE=slurm.pmix.1")).launcher, Launcher::Slurm);
}

#[test]
fn what_is_missing_or_contradictory_is_named_with_value_and_remedy() {
    for (text, expected) in [
        (
            "WORLD_SIZE=4",
            "invalid RANK `not set`: expected a number beside WORLD_SIZE=4: have torchrun start every process, or unset \
             WORLD_SIZE",
        ),
        ("RANK=4 WORLD_SIZE=4", "invalid RANK `4`: expected 0 to 3, below WORLD_SIZE=4"),
        ("RANK=-1 WORLD_SIZE=4", "invalid RANK `-1`: expected a whole number, 0 to 4294967295"),
        ("RANK=0 WORLD_SIZE=257", "invalid WORLD_SIZE `257`: expected a whole number, 1 to 256"),
        ("RANK=0 WORLD_SIZE=0", "invalid WORLD_SIZE `0`: expected a whole number, 1 to 256"),
        (
            "RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
            "invalid LOCAL_RANK `2`: expected 0 to 1, below LOCAL_WORLD_SIZE=2",
        ),
        (
            "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=5",
            "invalid LOCAL_WORLD_SIZE `5`: expected 1 to 4, at most WORLD_SIZE=4",
        ),
        (
            "RANK=0 WORLD_SIZE=4",
            "invalid MASTER_ADDR `not set`: expected rank 0's host, as torchrun sets it; or set \
             PUSHGATE_RENDEZVOUS=HOST:PORT",
        ),
        (
            "RANK=0 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=0",
            "invalid MASTER_PORT `0`: expected a whole number, 1 to 65535",
        ),
        (
            "PUSHGATE_RANKS=2",
            "invalid PUSHGATE_RANK `not set`: expected a number beside PUSHGATE_RANKS=2: have pushgate run start every \
             process, or unset PUSHGATE_RANKS",
        ),
        (
            "PUSHGATE_RANK=2 PUSHGATE_RANKS=2",
            "invalid PUSHGATE_RANK `2`: expected 0 to 1, below PUSHGATE_RANKS=2",
        ),
        (
            "OMPI_COMM_WORLD_RANK=0",
            "invalid OMPI_COMM_WORLD_SIZE `not set`: expected a number beside OMPI_COMM_WORLD_RANK=0: have Open MPI start \
             every process, or unset OMPI_COMM_WORLD_RANK",
        ),
        (
            &OPEN_MPI.replace("PMIX_RANK=1", "PMIX_RANK=2"),
            "invalid PMIX_RANK `2`: expected 1, as OMPI_COMM_WORLD_RANK: unset the variables of the launcher that did not \
             start this",
        ),
        (
            &SLURM.replace("PROCID=3", "PROCID=5"),
            "invalid SLURM_PROCID `5`: expected 0 to 4, below SLURM_NTASKS=5",
        ),
        (
            "PUSHGATE_RANK=0 PUSHGATE_RANKS=4 PUSHGATE_LOCAL_RANKS=2",
            "invalid rendezvous `none`: expected HOST:PORT at rank 0's host, because pushgate run has 2 of 4 ranks on this \
             host and names no host: PUSHGATE_RENDEZVOUS=HOST:PORT",
        ),
    ] {
        assert_eq!(says(text), expected);
    }
}

#[test]
fn flags_that_contradict_are_refused() {
    let refused = |rank, ranks, job: Option<&str>, text| {
        let given = Given { rank, ranks, job: job.map(str::to_owned) };
        Membership::find(&env(text), &given, &Settings::default()).unwrap_err().to_string()
    };
    for (e, expected) in [
        (
            refused(Some(0), None, None, ""),
            "invalid rank `0`: expected beside ranks, the number of ranks of the job",
        ),
        (refused(Some(2), Some(2), None, ""), "invalid rank `2`: expected 0 to 1"),
        (refused(Some(0), Some(257), None, ""), "invalid ranks `257`: expected 1 to 256"),
        (
            refused(None, Some(3), None, OPEN_MPI),
            "invalid ranks `3`: expected 4, the number of ranks that Open MPI started",
        ),
        (refused(None, None, Some(""), OPEN_MPI), "invalid job ``: expected a name of 1 to 80 bytes"),
    ] {
        assert_eq!(e, expected);
    }
    let ranks_alone = Given { ranks: Some(3), ..Given::default() };
    assert_eq!(Membership::find(&env(""), &ranks_alone, &Settings::default()).unwrap(), None);
}

#[test]
fn a_long_name_of_a_job_is_cut_and_stays_unique() {
    let named = |id: &str| found(&TORCHRUN.replace("run7", id)).job;
    let [a, b] = [named(&format!("{}a", "é".repeat(99))), named(&format!("{}b", "é".repeat(99)))];
    assert!(a != b && a.len() <= MAX_JOB && b.len() <= MAX_JOB, "{a} {b}");
    assert!(a.starts_with("torchrun-é"), "{a}");
    assert_eq!(named(&format!("{}a", "é".repeat(99))), a);
}

#[test]
fn ranks_take_gpus_by_their_number_on_their_host() {
    let rank = found(TORCHRUN);
    assert_eq!([8, 2, 1, 0].map(|devices| rank.device_index(devices)), [1, 1, 0, 0]);
    assert_eq!(found("RANK=3 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1").device_index(8), 0);
}

#[test]
fn rank_0_listens_at_all_addresses_where_its_own_name_is_a_loopback_address() {
    let place = |rank, rendezvous: &str| {
        let membership = Membership { rank, rendezvous: Some(rendezvous.into()), ..found(TORCHRUN) };
        membership.listens().unwrap()
    };
    for given in ["127.0.0.1:7000", "[::1]:7000", "localhost:7000", "10.0.0.1:7000"] {
        assert_eq!(place(0, given), given);
    }
    // RFC 6761: names below localhost are loopback addresses, where the resolver knows them.
    let name = "ranks.localhost:7000";
    if name.to_socket_addrs().is_ok_and(|mut all| all.all(|a| a.ip().is_loopback())) {
        assert_eq!((place(0, name).as_str(), place(1, name).as_str()), ("0.0.0.0:7000", name));
    }
}
