use super::reach::routes_over;
use super::*;

fn interface(index: u32, name: &str, addresses: &[(&str, u8)]) -> Interface {
    let held = |(ip, prefix): &(&str, u8)| {
        let ip = ip.parse().unwrap();
        Held { ip, prefix: *prefix, usable: true, passing: false, routed: false }
    };
    let addresses = addresses.iter().map(held).collect();
    Interface { index, name: name.into(), up: true, loopback: name == "lo", addresses }
}

fn lo() -> Interface {
    interface(1, "lo", &[("127.0.0.1", 8), ("::1", 128)])
}

fn auto(all: &[Interface]) -> String {
    choose(all, &Wish::default(), |_| None).unwrap().to_string()
}

#[test]
fn addresses_of_ordinary_interfaces_are_offered_first_ipv4_before_ipv6() {
    let docker = interface(2, "docker0", &[("172.17.0.1", 16)]);
    let eth0 = interface(3, "eth0", &[("fe80::1", 64), ("2001:db8::1", 64), ("10.0.0.1", 24)]);
    let mut eth1 = interface(4, "eth1", &[("10.1.0.1", 24)]);
    let host = [lo(), docker.clone(), eth0.clone(), eth1.clone()];
    assert_eq!(auto(&host), "10.0.0.1 (eth0), 10.1.0.1 (eth1), 2001:db8::1 (eth0)");
    eth1.addresses[0].routed = true;
    let host = [lo(), docker.clone(), eth0.clone(), eth1.clone()];
    assert_eq!(auto(&host), "10.1.0.1 (eth1), 10.0.0.1 (eth0), 2001:db8::1 (eth0)");
    eth1.up = false;
    assert_eq!(auto(&[lo(), docker.clone(), eth0, eth1]), "10.0.0.1 (eth0), 2001:db8::1 (eth0)");
    assert_eq!(auto(&[lo(), docker]), "172.17.0.1 (docker0)");
}

#[test]
fn addresses_of_the_loopback_device_and_of_the_link_are_offered_where_there_are_no_others() {
    let eth0 = interface(7, "eth0", &[("fe80::1", 64)]);
    let routed =
        interface(1, "lo", &[("127.0.0.1", 8), ("::1", 128), ("10.9.0.1", 32), ("2001:db8::1", 128)]);
    assert_eq!(auto(&[routed, eth0.clone()]), "10.9.0.1 (lo), 2001:db8::1 (lo)");
    let offered = choose(&[lo(), eth0], &Wish::default(), |_| None).unwrap();
    assert_eq!(offered.to_string(), "fe80::1%eth0");
    assert_eq!(offered.sockets()[0].to_string(), "[fe80::1%7]:0");
}

#[test]
fn a_host_without_an_address_for_others_says_what_it_has_and_what_to_set() {
    let mut eth0 = interface(2, "eth0", &[]);
    let offered = choose(&[lo(), eth0.clone()], &Wish::default(), |_| None).unwrap();
    assert_eq!(offered.at[0].to_string(), "127.0.0.1 (lo)");
    let why = offered.only_here.unwrap();
    assert!(
        why.contains("lo has 127.0.0.1, ::1, eth0 has no address") && why.contains("PUSHGATE_HOST"),
        "{why}"
    );
    eth0.up = false;
    let mut down = lo();
    down.up = false;
    let why = choose(&[down, eth0], &Wish::default(), |_| None).unwrap_err();
    assert!(why.contains("lo is down, eth0 is down") && why.contains("PUSHGATE_HOST"), "{why}");
}

#[test]
fn the_rdma_devices_own_interface_comes_first_then_those_of_its_node() {
    let host = [
        lo(),
        interface(2, "eth0", &[("10.0.0.1", 24)]),
        interface(3, "eth1", &[("10.1.0.1", 24)]),
        interface(4, "ib0", &[("10.2.0.1", 24)]),
    ];
    let own = ["10.2.0.1".parse().unwrap()];
    let wish = Wish { own: &own, node: Some(1), ..Wish::default() };
    let node = |name: &str| Some(u32::from(name != "eth0"));
    let offered = choose(&host, &wish, node).unwrap();
    assert_eq!(offered.to_string(), "10.2.0.1 (ib0), 10.1.0.1 (eth1), 10.0.0.1 (eth0)");
}

#[test]
fn a_list_of_interfaces_in_nccls_way_and_a_family_choose() {
    let host = [
        lo(),
        interface(2, "eth0", &[("10.0.0.1", 24), ("2001:db8::1", 64)]),
        interface(3, "eth10", &[("10.1.0.1", 24)]),
        interface(4, "docker0", &[("172.17.0.1", 16)]),
    ];
    let by = |list: &str, family| {
        let names = Names::parse("NCCL_SOCKET_IFNAME", list).unwrap();
        let wish = Wish { names: Some(&names), family, ..Wish::default() };
        choose(&host, &wish, |_| None).map_or_else(|e| e, |o| o.to_string())
    };
    assert_eq!(by("eth1", None), "10.1.0.1 (eth10)");
    assert_eq!(by("eth", None), "10.0.0.1 (eth0), 10.1.0.1 (eth10), 2001:db8::1 (eth0)");
    assert_eq!(by("=eth10,eth0", None), "10.1.0.1 (eth10), 10.0.0.1 (eth0), 2001:db8::1 (eth0)");
    assert_eq!(by("^eth0,eth10", None), "172.17.0.1 (docker0)");
    assert_eq!(by("^=eth1,docker0", Some(Family::V4)), "10.0.0.1 (eth0), 10.1.0.1 (eth10)");
    assert_eq!(by("docker", None), "172.17.0.1 (docker0)");
    assert_eq!(by("eth", Some(Family::V6)), "2001:db8::1 (eth0)");
    let why = by("=eth1", None);
    assert!(
        why.contains("eth0 is not in NCCL_SOCKET_IFNAME==eth1") && why.contains("PUSHGATE_HOST"),
        "{why}"
    );
    assert_eq!(Names::parse("X", "^="), None);
}

#[test]
fn an_address_that_is_named_is_taken_with_the_interface_of_a_link_local_one() {
    let host = [
        lo(),
        interface(2, "eth0", &[("fe80::1", 64), ("10.0.0.1", 24)]),
        interface(3, "eth1", &[("fe80::1", 64), ("fe80::2", 64)]),
    ];
    let by = |host_setting: &str| {
        let wish = Wish { host: host_setting, ..Wish::default() };
        choose(&host, &wish, |_| None).map_or_else(|e| e, |o| o.to_string())
    };
    assert_eq!(by("10.0.0.1"), "10.0.0.1 (eth0)");
    assert_eq!(by("10.9.9.9"), "10.9.9.9", "binding there fails, and says so");
    assert_eq!(
        (by("fe80::1%eth1"), by("fe80::1%2"), by("fe80::2")),
        ("fe80::1%eth1".into(), "fe80::1%eth0".into(), "fe80::2%eth1".into())
    );
    assert!(by("fe80::1").contains("eth0 and eth1 have it; name one, as fe80::1%eth0"), "{}", by("fe80::1"));
    for (wrong, says) in [
        ("fe80::9%eth0", "no interface has it: lo has"),
        ("fe80::1%", "no IP address"),
        ("10.0.0.1%eth0", "no IP address"),
    ] {
        let why = by(wrong);
        assert!(why.contains(says) && why.contains("PUSHGATE_HOST"), "{why}");
    }
}

#[test]
fn a_dialer_takes_addresses_of_its_own_networks_first_and_its_own_interfaces_for_link_local_ones() {
    let own = [
        lo(),
        interface(2, "eth0", &[("10.0.0.7", 24), ("fe80::7", 64)]),
        interface(5, "eth1", &[("10.1.0.7", 24), ("fe80::8", 64)]),
    ];
    let places = |all: &[&str]| all.iter().map(|at| at.parse().unwrap()).collect::<Vec<SocketAddr>>();
    let routes =
        |all: &[&str]| routes_over(&places(all), &own).iter().map(SocketAddr::to_string).collect::<Vec<_>>();
    assert_eq!(
        routes(&["10.9.0.1:4", "10.1.0.1:4", "10.0.0.1:4"]),
        ["10.1.0.1:4", "10.0.0.1:4", "10.9.0.1:4"]
    );
    assert_eq!(routes(&["[fe80::1%99]:4"]), ["[fe80::1%2]:4", "[fe80::1%5]:4"]);
    assert_eq!(routes_over(&places(&["[fe80::1%99]:4"]), &[lo()]), []);
}

#[test]
fn places_are_read_with_interfaces_and_several_at_once() {
    let texts = |place: &str, port| {
        resolve(place, port)
            .map(|all| all.iter().map(SocketAddr::to_string).collect::<Vec<_>>())
            .map_err(|e| e.to_string())
    };
    assert_eq!(texts("10.0.0.1:5,[::1]:6", None).unwrap(), ["10.0.0.1:5", "[::1]:6"]);
    assert_eq!(texts("[fe80::1%7]:5", None).unwrap(), ["[fe80::1%7]:5"]);
    assert_eq!(texts("[fe80::1%lo]:5", None).unwrap(), ["[fe80::1%1]:5"]);
    assert_eq!(
        (texts("::1", Some(9)), texts("10.0.0.1", Some(9)), texts("fe80::1%1", Some(9))),
        (Ok(vec!["[::1]:9".into()]), Ok(vec!["10.0.0.1:9".into()]), Ok(vec!["[fe80::1%1]:9".into()]))
    );
    assert!(texts("10.0.0.1", None).unwrap_err().contains("no port"));
    assert!(texts("10.0.0.1:x", Some(9)).unwrap_err().contains("`x` is no port"));
    assert!(texts("[fe80::1%nosuch0]:5", None).unwrap_err().contains("no interface nosuch0, there are "));
}

#[test]
fn several_addresses_are_listened_at_with_one_port_and_the_one_that_is_reached_is_taken() {
    let at = |ip: [u8; 4]| SocketAddr::from((ip, 0));
    let all = listen(&[at([127, 0, 0, 5]), at([127, 0, 0, 6])]).unwrap();
    let ports: Vec<_> = all.iter().map(|l| l.local_addr().unwrap().port()).collect();
    assert_eq!(ports[0], ports[1]);
    // Nobody listens at the first.
    let to = [SocketAddr::from(([127, 0, 0, 7], ports[0])), all[1].local_addr().unwrap()];
    let until = std::time::Instant::now() + pushgate_tests::hang();
    let mut reach = Reach::new(&to);
    let (reached, _socket) = loop {
        if let Some(found) = reach.advance().unwrap() {
            break found;
        }
        reach.wait(until);
    };
    assert_eq!(reached, to[1]);
    let mut nobody = Reach::new(&to[..1]);
    let why = loop {
        match nobody.advance() {
            Ok(_) => nobody.wait(until),
            Err(why) => break why,
        }
    };
    assert!(why.starts_with(&format!("{}: Connection refused", to[0])), "{why}");
    let gone = listen(&[at([127, 0, 0, 5]), "[2001:db8::99]:0".parse().unwrap()]).unwrap();
    assert_eq!(gone.len(), 1, "an address that this host does not have is left out");
    assert!(listen(&["192.0.2.77:0".parse().unwrap()]).unwrap_err().to_string().starts_with("192.0.2.77: "));
}
