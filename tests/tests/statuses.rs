//! Checks that the lists of statuses agree: abi.h, the device API, this library's names and the
//! documents.

const ABI: &str = include_str!("../../driver-shim/include/pushgate/abi.h");
const DEVICE: &str = include_str!("../../gpu-kernels/include/pushgate/device.cuh");
const DEVICE_API: &str = include_str!("../../docs/device-api.md");
const PROTOCOL: &str = include_str!("../../docs/protocol.md");

/// The statuses of abi.h: their names in lower case, and their numbers.
fn statuses() -> Vec<(String, u64)> {
    let section = ABI.split("- statuses */").nth(1).unwrap().split("/* Details of").next().unwrap();
    let defines = section.lines().filter_map(|line| line.strip_prefix("#define PUSHGATE_"));
    let pair = |define: &str| {
        let (name, number) = define.split_once(' ').unwrap();
        (name.to_lowercase(), number.trim().parse().unwrap())
    };
    defines.map(pair).collect()
}

#[test]
fn p7_every_status_that_a_host_may_write_has_a_name_on_the_device() {
    let all = statuses();
    assert!(all.len() >= 10, "{all:?}");
    let section = DEVICE.split("enum class status : u32 {").nth(1).unwrap().split("};").next().unwrap();
    let named: Vec<(&str, &str)> = section
        .lines()
        .filter_map(|line| line.split("//").next().unwrap().trim().strip_suffix(',')?.split_once(" = "))
        .collect();
    let expected: Vec<(String, String)> =
        all.iter().map(|(name, _)| (name.clone(), format!("PUSHGATE_{}", name.to_uppercase()))).collect();
    assert_eq!(named, expected.iter().map(|(a, b)| (&**a, &**b)).collect::<Vec<_>>());
}

#[test]
fn every_status_has_a_name_in_the_library_and_in_the_documents() {
    for (name, number) in statuses() {
        let words = name.replace('_', " ");
        assert_eq!(pushgate::status_name(number), words);
        assert!(PROTOCOL.contains(&format!("| {number} | {words} |")), "docs/protocol.md: {number} {words}");
        assert!(DEVICE_API.contains(&format!("`{name}`")), "docs/device-api.md: {name}");
    }
}
