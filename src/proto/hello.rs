//! Who fits: checks a peer's hello.
//!
//! Owns the words of every refusal: both values, and who must change. The text goes to the log of
//! this side and, in a `Refused`, to the peer, so it names both sides by what they are.

use std::fmt::Write as _;

use super::control::{Hello, Role};

/// Why a peer does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloRefusal {
    /// Another version of the protocol.
    #[error("{ours} speaks protocol {our_version}, {theirs} speaks {their_version}: {must_upgrade} must be upgraded")]
    Protocol {
        /// This side: role and program version.
        ours: String,
        /// Protocol of this side.
        our_version: u16,
        /// The peer: role and program version.
        theirs: String,
        /// Protocol of the peer.
        their_version: u16,
        /// The side with the older protocol.
        must_upgrade: String,
    },
    /// Another arithmetic.
    #[error("{ours} computes with numerics {our_id:?}, {theirs} with {their_id:?}: {must_change}")]
    Numerics {
        /// This side: role and program version.
        ours: String,
        /// Numerics of this side.
        our_id: String,
        /// The peer: role and program version.
        theirs: String,
        /// Numerics of the peer.
        their_id: String,
        /// Who must change what.
        must_change: String,
    },
    /// Another model.
    #[error("{ours} serves model {our_digest}, {theirs} serves {their_digest}: {must_change}")]
    Model {
        /// This side: role and program version.
        ours: String,
        /// First bytes of this side's digest, in hex.
        our_digest: String,
        /// The peer: role and program version.
        theirs: String,
        /// First bytes of the peer's digest, in hex.
        their_digest: String,
        /// Who must change what.
        must_change: String,
    },
    /// Two coordinators.
    #[error("both sides are coordinators ({ours}, {theirs}): give the address of a stage, or start one with `stage`")]
    TwoCoordinators {
        /// This side: role and program version.
        ours: String,
        /// The peer: role and program version.
        theirs: String,
    },
}

/// Checks a peer's hello against this side's.
///
/// # Errors
/// [`HelloRefusal`] for the first thing that differs: protocol, numerics, model, role.
pub fn check(ours: &Hello, theirs: &Hello) -> Result<(), HelloRefusal> {
    let (us, them) = (side(ours), side(theirs));
    if ours.protocol != theirs.protocol {
        let must_upgrade = if ours.protocol < theirs.protocol { us.clone() } else { them.clone() };
        return Err(HelloRefusal::Protocol {
            ours: us,
            our_version: ours.protocol,
            theirs: them,
            their_version: theirs.protocol,
            must_upgrade,
        });
    }
    if ours.numerics != theirs.numerics {
        return Err(HelloRefusal::Numerics {
            must_change: must_change(ours, theirs, "run the same program version"),
            ours: us,
            our_id: ours.numerics.clone(),
            theirs: them,
            their_id: theirs.numerics.clone(),
        });
    }
    if ours.model_digest != theirs.model_digest {
        return Err(HelloRefusal::Model {
            must_change: must_change(ours, theirs, "be started with the same --model"),
            ours: us,
            our_digest: short_hex(&ours.model_digest),
            theirs: them,
            their_digest: short_hex(&theirs.model_digest),
        });
    }
    match (ours.role, theirs.role) {
        (Role::Coordinator, Role::Coordinator) => Err(HelloRefusal::TwoCoordinators { ours: us, theirs: them }),
        (Role::Coordinator | Role::Stage, Role::Stage) | (Role::Stage, Role::Coordinator) => Ok(()),
    }
}

/// The first six bytes of a digest, in hex, for messages.
#[must_use]
pub fn short_hex(digest: &[u8; 32]) -> String {
    digest.iter().take(6).fold(String::new(), |mut text, byte| {
        // Writing into a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn side(hello: &Hello) -> String {
    let role = match hello.role {
        Role::Coordinator => "the coordinator",
        Role::Stage => "a stage",
    };
    format!("{role} ({})", hello.software)
}

/// The coordinator's choice holds for its ring; between stages neither is right by itself.
fn must_change(ours: &Hello, theirs: &Hello, what: &str) -> String {
    match (ours.role, theirs.role) {
        (Role::Coordinator, Role::Stage) | (Role::Stage, Role::Coordinator) => {
            format!("the stage must {what} as the coordinator")
        }
        (Role::Stage, Role::Stage) => format!("both stages must {what} as their coordinator"),
        (Role::Coordinator, Role::Coordinator) => format!("both must {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;

    fn hello(role: Role) -> Hello {
        Hello {
            protocol: 1,
            numerics: "canon-1".to_owned(),
            model_digest: [0xab; 32],
            role,
            software: "ringfence 0.1.0".to_owned(),
        }
    }

    #[test]
    fn equal_peers_fit_unless_both_are_coordinators() {
        let (stage, coordinator) = (hello(Role::Stage), hello(Role::Coordinator));
        assert_eq!(check(&stage, &stage), Ok(()));
        assert_eq!(check(&stage, &coordinator), Ok(()));
        assert_eq!(check(&coordinator, &stage), Ok(()));
        expect!["both sides are coordinators (the coordinator (ringfence 0.1.0), the coordinator (ringfence 0.1.0)): give the address of a stage, or start one with `stage`"]
            .assert_eq(&check(&coordinator, &coordinator).unwrap_err().to_string());
    }

    #[test]
    fn a_refusal_names_both_values_and_who_must_change() {
        let ours = hello(Role::Coordinator);
        let newer = Hello { protocol: 2, software: "ringfence 0.2.0".to_owned(), ..hello(Role::Stage) };
        expect!["the coordinator (ringfence 0.1.0) speaks protocol 1, a stage (ringfence 0.2.0) speaks 2: the coordinator (ringfence 0.1.0) must be upgraded"]
            .assert_eq(&check(&ours, &newer).unwrap_err().to_string());
        expect!["a stage (ringfence 0.2.0) speaks protocol 2, the coordinator (ringfence 0.1.0) speaks 1: the coordinator (ringfence 0.1.0) must be upgraded"]
            .assert_eq(&check(&newer, &ours).unwrap_err().to_string());
        let other = Hello { numerics: "canon-2".to_owned(), ..hello(Role::Stage) };
        expect![[r#"the coordinator (ringfence 0.1.0) computes with numerics "canon-1", a stage (ringfence 0.1.0) with "canon-2": the stage must run the same program version as the coordinator"#]]
            .assert_eq(&check(&ours, &other).unwrap_err().to_string());
        let other = Hello { model_digest: [1; 32], ..hello(Role::Stage) };
        expect!["the coordinator (ringfence 0.1.0) serves model abababababab, a stage (ringfence 0.1.0) serves 010101010101: the stage must be started with the same --model as the coordinator"]
            .assert_eq(&check(&ours, &other).unwrap_err().to_string());
        expect!["a stage (ringfence 0.1.0) serves model abababababab, a stage (ringfence 0.1.0) serves 010101010101: both stages must be started with the same --model as their coordinator"]
            .assert_eq(&check(&hello(Role::Stage), &other).unwrap_err().to_string());
    }
}
