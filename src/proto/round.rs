//! One session in the coordinator: streams truth and drafts, judges replies in position order.
