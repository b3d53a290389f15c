//! Checking that two peers mean the same protocol, model and numeric profile.

use shimmer_common::container::Fingerprint;
use shimmer_common::profile::NumericProfile;
use shimmer_proto::{PROTOCOL_VERSION, v1};

/// What one side has, to be compared with what the other side says.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Name for people: "node kitchen-pc" or "the coordinator".
    pub name: String,
    /// The model; `None` before a node has one.
    pub fingerprint: Option<Fingerprint>,
    /// The numeric profile; `None` before a node has one.
    pub profile: Option<NumericProfile>,
}

/// The wire form of our side.
pub fn peer_to_wire(ours: &Facts) -> v1::Peer {
    v1::Peer {
        protocol: PROTOCOL_VERSION,
        fingerprint: ours.fingerprint.map(|f| f.0.to_vec().into()).unwrap_or_default(),
        profile: ours.profile.map(|p| v1::Profile { fraction_bits: p.fraction_bits.into() }),
        name: ours.name.clone(),
    }
}

/// Compares the other side with ours; what either side does not have yet is not compared.
///
/// # Errors
/// One sentence that names both sides and says what to do.
pub fn check_peer(ours: &Facts, theirs: Option<&v1::Peer>) -> Result<Facts, String> {
    let Some(theirs) = theirs else {
        return Err(format!(
            "{} got a greeting without its contents; use the same version of Shimmer on both sides",
            ours.name
        ));
    };
    let name = printable(&theirs.name);
    if theirs.protocol != PROTOCOL_VERSION {
        return Err(format!(
            "{name} speaks protocol {}, {} speaks protocol {PROTOCOL_VERSION}: install the same version of Shimmer on both machines",
            theirs.protocol, ours.name
        ));
    }
    let fingerprint = match theirs.fingerprint.len() {
        0 => None,
        _ => Some(Fingerprint(theirs.fingerprint.as_ref().try_into().map_err(|_| {
            format!("{name} sent a model fingerprint of {} bytes instead of 32; install the same version of Shimmer on both machines", theirs.fingerprint.len())
        })?)),
    };
    if let (Some(a), Some(b)) = (ours.fingerprint, fingerprint)
        && a != b
    {
        return Err(format!(
            "{name} has model {}, {} has model {} (both protocol {PROTOCOL_VERSION}): give both the same model, or join the node again with an empty --data directory to fetch this one",
            short(b),
            ours.name,
            short(a)
        ));
    }
    let profile = theirs.profile.as_ref().map(|p| u8::try_from(p.fraction_bits)).transpose();
    let profile = profile
        .map_err(|_| format!("{name} sent an impossible numeric profile; install the same version of Shimmer on both machines"))?
        .map(|fraction_bits| NumericProfile { fraction_bits });
    if let (Some(a), Some(b)) = (ours.profile, profile)
        && a != b
    {
        return Err(format!(
            "{name} sums with {} fractional bits, {} with {}: start both with the same numeric profile",
            b.fraction_bits, ours.name, a.fraction_bits
        ));
    }
    Ok(Facts { name, fingerprint, profile })
}

/// First digits of a fingerprint, enough for people to compare.
fn short(fingerprint: Fingerprint) -> String {
    fingerprint.to_string().chars().take(12).collect::<String>() + "…"
}

/// Text from the network without control characters, at most `most` characters of it.
pub fn clean_text(text: &str, most: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(most).collect()
}

/// A name from the network, shortened and free of control characters.
pub(crate) fn printable(name: &str) -> String {
    let clean = clean_text(name, 80);
    if clean.is_empty() { "an unnamed peer".to_owned() } else { clean }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_wrong_is_nothing_to_say() {
        assert_eq!(clean_text("", 500), "");
        assert_eq!(clean_text("a\u{1b}[31mb\n", 500), "a[31mb");
        assert_eq!(clean_text(&"x".repeat(900), 500).len(), 500);
    }

    fn facts(name: &str, model: u8) -> Facts {
        Facts {
            name: name.into(),
            fingerprint: Some(Fingerprint([model; 32])),
            profile: Some(NumericProfile::default()),
        }
    }

    #[test]
    fn differences_are_named_with_both_sides() {
        let ours = facts("the coordinator", 1);
        assert!(check_peer(&ours, Some(&peer_to_wire(&facts("node a", 1)))).is_ok());

        let model = check_peer(&ours, Some(&peer_to_wire(&facts("node a", 2)))).unwrap_err();
        assert!(
            model.contains("node a has model 020202020202…")
                && model.contains("the coordinator has model 010101010101…"),
            "{model}"
        );

        let mut wire = peer_to_wire(&facts("node a", 1));
        wire.protocol = 7;
        let protocol = check_peer(&ours, Some(&wire)).unwrap_err();
        assert!(
            protocol.contains("node a speaks protocol 7, the coordinator speaks protocol 2"),
            "{protocol}"
        );

        let mut other = facts("node a", 1);
        other.profile = Some(NumericProfile { fraction_bits: 16 });
        assert!(check_peer(&ours, Some(&peer_to_wire(&other))).unwrap_err().contains("16 fractional bits"));
    }

    #[test]
    fn a_node_without_a_model_is_welcome_and_odd_greetings_are_not() {
        let ours = facts("the coordinator", 1);
        let empty = Facts { name: "node b".into(), fingerprint: None, profile: None };
        assert!(check_peer(&ours, Some(&peer_to_wire(&empty))).is_ok());
        assert!(check_peer(&ours, None).is_err());
        let mut wire = peer_to_wire(&empty);
        wire.fingerprint = vec![1; 31].into();
        assert!(check_peer(&ours, Some(&wire)).is_err());
        wire.fingerprint = bytes::Bytes::new();
        wire.profile = Some(v1::Profile { fraction_bits: 1 << 20 });
        assert!(check_peer(&ours, Some(&wire)).is_err());
    }
}
