//! What the plugin says where NCCL takes another tuner, and which path NCCL's releases get. These tests are the same over any
//! transport.

use super::{GPU, command, logged, plugin};

#[test]
fn every_release_of_nccl_hands_over_gpu_memory() {
    for version in 8..=12 {
        let mut command = command(&format!("many --times 3 --version {version}"));
        command.envs(GPU);
        let (_, log) = logged(command);
        assert!(log.contains("path push: ") && log.contains("; the copier is process "), "v{version}: {log}");
    }
}

#[test]
fn what_another_tuner_costs_is_said_once() {
    let said = |tuner: Option<&str>, path: &str| {
        let mut command = command("many --times 3");
        command.env_remove("NCCL_TUNER_PLUGIN").envs(tuner.map(|name| ("NCCL_TUNER_PLUGIN", name)));
        command.envs([GPU[0], ("PUSHGATE_PATH", path)]);
        let (_, log) = logged(command);
        ["NCCL takes the tuner ", "NCCL takes no tuner"].map(|text| log.matches(text).count())
    };
    // The plugin under another name is another tuner.
    let folder = std::env::temp_dir().join(format!("pushgate-another-tuner-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let another = folder.join("libanother.so");
    std::fs::copy(plugin(), &another).unwrap();
    assert_eq!(said(another.to_str(), "auto"), [1, 0]);
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(said(Some("libc.so.6"), "auto"), [0, 1], "a library without a tuner");
    assert_eq!(said(Some("libnccl-tuner-that-there-is-not.so"), "auto"), [0; 2]);
    assert_eq!(said(Some("none"), "auto"), [0, 1]);
    assert_eq!(said(Some("/opt/libnccl-net-pushgate.so"), "auto"), [0; 2]);
    assert_eq!(said(None, "auto"), [0; 2]);
    assert_eq!(said(Some("none"), "bounce"), [0; 2], "the tuner is for GPU memory");
}
